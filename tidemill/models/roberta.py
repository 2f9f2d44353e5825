"""RoBERTa, XLM-RoBERTa and CamemBERT: a BERT whose positions begin after that of padding."""

from __future__ import annotations

from typing import ClassVar

from tidemill.models.bert import Bert, BertCrossEncoder
from tidemill.models.settings import Keys, Settings


class Roberta(Bert):
    PREFIXES: ClassVar = ("", "roberta.")
    KEYS: ClassVar[Keys] = {**Bert.KEYS, "vocab_size": 50265, "pad_token_id": 1}

    @classmethod
    def first_of(cls, settings: Settings) -> int:
        first: int = settings["pad_token_id"] + 1
        return first


class RobertaCrossEncoder(Roberta, BertCrossEncoder):
    HEAD: ClassVar = [
        ("dense", "dense", "classifier.dense", ""),
        ("labels", "labels", "classifier.out_proj", ""),
    ]


class XLMRoberta(Roberta):
    KEYS: ClassVar = {**Roberta.KEYS, "vocab_size": 30522}


class XLMRobertaCrossEncoder(XLMRoberta, RobertaCrossEncoder):
    pass
