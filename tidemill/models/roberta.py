"""RoBERTa and XLM-RoBERTa: a BERT whose positions begin at 2, without types that tell the texts of a pair apart."""

from __future__ import annotations

from typing import ClassVar

from tidemill.models.bert import Bert, BertCrossEncoder


class Roberta(Bert):
    PREFIXES: ClassVar = ("", "roberta.")
    first_position: ClassVar = 2  # after that of padding, which is 1


class RobertaCrossEncoder(Roberta, BertCrossEncoder):
    HEAD: ClassVar = [("dense", "dense", "classifier.dense", ""), ("classifier", "labels", "classifier.out_proj", "")]
