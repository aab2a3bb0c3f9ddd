"""What is told to people after the fact: explain, doctor, summary, report. Imported by app and cli only."""
