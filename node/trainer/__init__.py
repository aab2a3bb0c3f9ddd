"""The trainer: loop, lease scheduler, submissions, publisher, audits."""
