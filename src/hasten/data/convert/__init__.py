"""`hasten convert`: converts datasets of other formats to Parquet files that `ParquetDataset` reads and shuffles fast.

`kinds` picks the `Source` for a path or name (`images`, `text`, `tars`, `samples`); `write` turns its pieces into
files, and can resume after an interruption.
"""
