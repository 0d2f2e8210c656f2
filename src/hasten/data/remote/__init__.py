"""Parquet files on servers and in object stores: ranges planned from footers, fetched with retries, kept on disk."""
