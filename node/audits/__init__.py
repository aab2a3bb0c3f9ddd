"""Audits: what a worker claims, computed again by a prefill, in a process that can be killed."""
