"""START READING HERE: one file, one role, one loop."""
