"""From a submission to a verdict: checks, audits, bounds, judgement, calibration."""
