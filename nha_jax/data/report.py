"""What became of the corpus: counts that add up, for people to read."""

import dataclasses

from nha_jax.data.token_store import ReadCounts


@dataclasses.dataclass(frozen=True)
class SplitReport:
    """One side of the split.

    Attributes:
        documents: Documents.
        num_bytes: Bytes of their text.
        targets: Tokens that are targets in one epoch: all but the first of each document.
        pieces: Segments that the documents were cut into.
        rows: Rows of one epoch.
        row_positions: Rows times sequence length; the part above `targets` is padding.
    """

    documents: int
    num_bytes: int
    targets: int
    pieces: int
    rows: int
    row_positions: int

    @property
    def padding(self) -> float:
        """Share of the positions in rows that hold no text."""
        return 1.0 - self.targets / self.row_positions if self.row_positions else 0.0

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.documents:,} documents, {self.num_bytes:,} bytes, {self.targets:,} target "
            f"tokens in {self.pieces:,} pieces and {self.rows:,} rows ({self.padding:.1%} padding)"
        )


@dataclasses.dataclass(frozen=True)
class DataReport:
    """Everything that was read, and everything that was left out.

    Attributes:
        train: The training side.
        validation: The validation side; None if there is none.
        split: How the sides were told apart: `"file"`, `"record"`, `"cut"` (a single text file cut
            in two), `"source"` (validation has a source of its own) or `"none"`.
        read: Counts of reading `DataConfig.source`.
        read_validation: Counts of reading `DataConfig.validation_source`, if there is one.
        duplicates: Documents dropped because an earlier one has the same bytes.
        in_validation: Documents dropped from train because validation has one with the same bytes.
    """

    train: SplitReport
    validation: SplitReport | None
    split: str
    read: ReadCounts
    read_validation: ReadCounts | None
    duplicates: int
    in_validation: int

    def __str__(self) -> str:
        """Several lines; what is zero among the drops is not mentioned."""
        ways = {
            "file": "by file",
            "record": "by record",
            "cut": "one text file cut in two",
            "source": "validation has its own source",
            "none": "no validation",
        }
        lines = [f"data: {self.read.files:,} files, split: {ways[self.split]}"]
        lines.append(f"  train: {self.train}")
        if self.validation is not None:
            lines.append(f"  validation: {self.validation}")
        drops = [
            (self.duplicates, "duplicate documents"),
            (self.in_validation, "train documents that are also in validation"),
        ]
        for counts, where in ((self.read, ""), (self.read_validation, " of validation")):
            if counts is not None:
                drops += [
                    (counts.bad_records, f"bad records{where}"),
                    (counts.empty_documents, f"empty documents{where}"),
                    (counts.unreadable_files, f"unreadable files{where}"),
                    (counts.ignored_files, f"files{where} of no known format or listed twice"),
                ]
        dropped = [f"{count:,} {what}" for count, what in drops if count]
        lines.append(f"  dropped: {', '.join(dropped) or 'nothing'}")
        for counts in (self.read, self.read_validation):
            if counts is not None:
                lines += [f"  bad record: {message}" for message in counts.bad_record_messages]
                if counts.replaced_utf8:
                    lines.append(f"  repaired: invalid UTF-8 in {counts.replaced_utf8:,} documents")
        return "\n".join(lines)
