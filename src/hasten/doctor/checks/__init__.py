"""The checks: small rules, one a class, grouped by what they look at."""
