"""Tasksets that ship with the node: ordinary `verifiers` v1 packages."""
