"""What sparkvod promises to be, measured beside its peers; see ``benchmarks/README.md``."""
