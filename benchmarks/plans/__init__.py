"""What plans and budgets gain: simulated steps, and one benchmark that measures what the plans predict."""
