"""The validator: follow the policy, measure what others sent in, report."""
