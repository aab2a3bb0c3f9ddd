"""One file a command: parses, calls, prints; decides nothing."""
