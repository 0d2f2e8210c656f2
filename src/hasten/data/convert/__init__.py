"""`hasten convert`: files of other kinds as Parquet that `hasten.data.ParquetDataset` shuffles and reads quickly."""
