"""The validator: follow the policy, measure workers' submissions, report."""
