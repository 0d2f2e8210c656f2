"""Terminal and HTML views of the core results: proofs, checks, cluster plans, target searches."""
