"""Starting ranks: on local processes, on Spark, or from whatever the environment says. See ``launcher.py``."""
