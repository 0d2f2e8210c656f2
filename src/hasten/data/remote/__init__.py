"""Reads Parquet files on web servers and in object stores.

`ranges` plans byte ranges from a file's footer; `web` and `stores` fetch them, with retries (`tries`); `cache` keeps
them on a local disk; `files` puts these together and prefetches row groups.
"""
