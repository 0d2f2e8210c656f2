"""The sources for CSV and JSON lines. A file is read twice: to find types that fit all rows, then to convert."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hasten.data.convert.source import BadRecord, RowRange, RowSource, fingerprint_of, refuse
from hasten.errors import HastenError

_BLOCK = 1 << 20
_CHUNK = 10_000  # lines whose types are inferred together
# Texts that look like numbers but must stay text, as a number would not give them back: 00501, and as a float
# 12345678901234567890.
_LEADING_ZERO, _LONG = r"^[+-]?0[0-9]", r"^[+-]?[0-9]{16,}$"


class Csv:
    """A CSV file with column names in its first line; a column becomes int64, float64, bool or text.

    Args:
        file: The file, in UTF-8.
        text: Columns to keep as text in any case.
    """

    what = "rows of CSV"
    records: int | None = None

    def __init__(self, file: Path, text: tuple[str, ...] = ()) -> None:
        self._file, self._text = file, text
        self.size = file.stat().st_size
        self._schema: Any = None
        self._bad: list[BadRecord] = []
        if not self.size:
            raise HastenError(f"{file} is empty", "a CSV file has the names of its columns in the first line")

    def fingerprint(self) -> str:
        """Return a digest of the file's name, size and time, and of the text columns."""
        return fingerprint_of([self._file], self._text)

    def schema(self) -> Any:
        """Return the schema: for each column, the narrowest type that fits all its values."""
        import pyarrow as pa

        if self._schema is not None:
            return self._schema
        possible: dict[str, list[Any]] = {}
        self._bad.clear()
        for batch in self._blocks(None):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                fitting = possible.setdefault(name, [pa.int64(), pa.float64(), pa.bool_()])
                fitting[:] = [kind for kind in fitting if _all_are(column, kind)]
        if not possible:
            raise HastenError(f"{self._file} has no rows", "is it another file?")
        if missing := [name for name in self._text if name not in possible]:
            columns = ", ".join(map(repr, possible))
            raise HastenError(f"{self._file} has no column {missing[0]!r} for --text", f"it has {columns}")
        allowed = {name: [] if name in self._text else fitting for name, fitting in possible.items()}
        types = {name: fitting[0] if fitting else pa.string() for name, fitting in allowed.items()}
        self._schema = pa.schema(list(types.items()))
        return self._schema

    def pieces(self, start: int, size: int, skip_bad: bool) -> Iterator[RowRange]:
        """Yield the file's blocks after the first `start` rows, not counting rows with a wrong number of fields."""
        import pyarrow as pa

        schema, records = self.schema(), 0
        if self._bad and not skip_bad:
            raise refuse(self._bad[0])
        bad = () if start else tuple(self._bad)  # `schema` has found them all; report them with the first piece
        for batch in self._blocks(schema):
            records += batch.num_rows
            if records > start:
                yield RowRange(pa.Table.from_batches([batch], schema), records, bad)
                bad = ()

    def _blocks(self, schema: Any) -> Iterator[Any]:
        """Yield record batches with this schema or, if None, with all columns as text, and then also note bad rows."""
        import pyarrow as pa
        from pyarrow import csv

        def wrong(row: Any) -> str:
            if schema is None:
                place = f"row {row.number}" if row.number is not None else repr(row.text[:60])
                why = f"it has {row.actual_columns} fields, the first line {row.expected_columns}"
                self._bad.append(BadRecord(f"{self._file}, {place}", why))
            return "skip"

        try:
            with self._file.open("rb") as file:
                names = next(_csv_lines(file.readline()))
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise HastenError(f"{self._file}: two columns are called {twice[0]!r}", "give each its own name")
            types = {name: pa.string() if schema is None else schema.field(name).type for name in names}
            options = csv.ConvertOptions(
                column_types=types, strings_can_be_null=True, null_values=[""], quoted_strings_can_be_null=False
            )
            reading = csv.ReadOptions(block_size=_BLOCK, use_threads=False)
            parsing = csv.ParseOptions(newlines_in_values=True, invalid_row_handler=wrong)
            with csv.open_csv(self._file, reading, parsing, options) as reader:
                yield from reader
        except (pa.ArrowException, UnicodeDecodeError, StopIteration) as error:
            raise HastenError(f"{self._file} cannot be read as CSV: {error}", "is it UTF-8, with commas?") from None


def _csv_lines(line: bytes) -> Iterator[list[str]]:
    import csv

    return csv.reader([line.decode("utf-8-sig")])


def _all_are(column: Any, kind: Any) -> bool:
    """Return whether all values of a text column can become `kind`, and give the same text back."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_boolean(kind):
        words = pc.is_in(column.drop_null(), pa.array(["true", "false", "True", "False"]))
        return pc.all(words).as_py() is not False
    never = _LEADING_ZERO if pa.types.is_integer(kind) else f"{_LEADING_ZERO}|{_LONG}"
    if pc.any(pc.match_substring_regex(column, never)).as_py():
        return False
    try:
        column.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


class JsonLines(RowSource):
    """A file with a JSON object on each line.

    Args:
        file: The file, in UTF-8.
    """

    what = "lines of JSON"
    records: int | None = None

    def __init__(self, file: Path) -> None:
        self._file = file
        self.size = file.stat().st_size
        self._schema: Any = None

    def fingerprint(self) -> str:
        """Return a digest of the file's name, size and time."""
        return fingerprint_of([self._file])

    def schema(self) -> Any:
        """Return the schema that fits all lines: a column of integers and floats becomes one of floats."""
        import pyarrow as pa

        if self._schema is not None:
            return self._schema
        known: Any = None
        rows: list[dict[str, Any]] = []
        for number, row in enumerate(self._rows(0), 1):
            if isinstance(row, dict):
                rows.append(row)
            if len(rows) == _CHUNK:
                known = self._with(known, rows, number)
                rows = []
        if rows:
            known = self._with(known, rows, number)
        if known is None:
            first = next((row for row in self._rows(0) if isinstance(row, BadRecord)), None)
            if first is not None:
                raise refuse(first)
            raise HastenError(f"{self._file} has no lines", "is it another file?")
        nulls = {field.name for field in known if field.type == pa.null()}
        self._schema = pa.schema([field.with_type(pa.string()) if field.name in nulls else field for field in known])
        return self._schema

    def _with(self, known: Any, rows: list[dict[str, Any]], until: int) -> Any:
        """Return the schema that fits both `known` and these rows, which end at line `until`.

        Raises:
            HastenError: A column has values of different types.
        """
        import pyarrow as pa

        names = list(dict.fromkeys(name for row in rows for name in row))
        fields = []
        for name in names:
            try:
                fields.append(pa.field(name, pa.array([row.get(name) for row in rows]).type))
            except (pa.ArrowException, OverflowError) as error:
                raise HastenError(
                    f"{self._file}, before line {until}: {name!r} is not of one type: {error}", "a column has one type"
                ) from None
        schema = pa.schema(fields)
        try:
            return schema if known is None else pa.unify_schemas([known, schema], promote_options="permissive")
        except pa.ArrowException as error:
            raise HastenError(f"{self._file}, before line {until}: {error}", "a column has one type") from None

    def _rows(self, start: int) -> Iterator[dict[str, Any] | BadRecord]:
        with self._file.open("rb") as file:
            number = 0
            for at, line in enumerate(file, 1):
                if not line.strip():
                    continue
                number += 1
                if number <= start:
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield BadRecord(f"{self._file}, line {at}", f"it is no JSON: {error}")
                    continue
                yield row if isinstance(row, dict) else BadRecord(f"{self._file}, line {at}", "it is no JSON object")
