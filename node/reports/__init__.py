"""Reports for people: explain, doctor, summary, report. Imported by app and cli only."""
