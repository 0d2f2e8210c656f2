"""One small file a repository: it builds the repository's own module and tiny synthetic data for it."""
