"""What is going on: events from workers to the driver, progress bars."""
