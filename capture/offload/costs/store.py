"""Cost models on disk: one JSON file for each machine, device and version."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from offload.costs.cost_model import CostModel
from offload.costs.header_model import STAGES, Coefficient, HeaderModel
from offload.errors import CostModelError

FORMAT = 3


@dataclasses.dataclass(frozen=True, slots=True)
class CostKey:
    """The validity of costs.

    Attributes:
        machine: the processor's name.
        device: the backend's name.
        versions: of offload and torch, by name.
    """

    machine: str
    device: str
    versions: tuple[tuple[str, str], ...]

    def file_name(self) -> str:
        """A file name that is unique to the key."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return f"costs-{self.device}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def default_folder() -> Path:
    """The user's folder for cost models.

    Raises:
        CostModelError: platformdirs, which finds it, is missing.
    """
    try:
        import platformdirs  # noqa: PLC0415 - only needed to keep cost models
    except ImportError as error:
        raise CostModelError(
            f"keeping cost models needs platformdirs ({error}): `pip install 'offload[costs]'`, "
            "or give a folder"
        ) from error
    return platformdirs.user_cache_path("offload")


def save_cost_model(model: CostModel, key: CostKey, folder: Path | None = None) -> Path:
    """Write a model atomically, replacing an older one.

    Raises:
        CostModelError: the file cannot be written.
    """
    path = (folder or default_folder()) / key.file_name()
    document = {"format": FORMAT, "key": dataclasses.asdict(key), **dataclasses.asdict(model)}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document, indent=1))
        partial.replace(path)
    except OSError as error:
        raise CostModelError(
            f"the cost model cannot be kept: {error}; give another folder"
        ) from error
    return path


def load_cost_model(key: CostKey, folder: Path | None = None) -> CostModel | None:
    """The model kept for a key; None if there is none, or its format is older.

    Raises:
        CostModelError: the file is damaged, or its format is newer.
    """
    path = (folder or default_folder()) / key.file_name()
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CostModelError(f"the cost model cannot be read: {error}") from error
    try:
        document = json.loads(text)
        is_older = document["format"] in range(1, FORMAT)  # calibrate measures what it lacks
        return None if is_older else _decode(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CostModelError(
            f"{path} is damaged ({type(error).__name__}: {error}): delete it and calibrate again"
        ) from error


def _decode(document: dict[str, Any]) -> CostModel:
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']}, expected {FORMAT}")
    header = document["header"]
    coefficients = {
        stage: {
            term: Coefficient(*(float(one[name]) for name in ("value_ns", "low_ns", "high_ns")))
            for term, one in terms.items()
        }
        for stage, terms in header["coefficients"].items()
    }
    if set(coefficients) != set(STAGES):
        raise ValueError(f"coefficients of {sorted(coefficients)}, expected of {sorted(STAGES)}")
    return CostModel(
        header=HeaderModel(
            coefficients,
            int(header["n_observations"]),
            {str(name): float(time) for name, time in header["displaced_ns"].items()},
            tuple((float(low), float(high)) for low, high in header["held_out_ratios"]),
        ),
        issue_ns=float(document["issue_ns"]),
        handoff_ns=float(document["handoff_ns"]),
        launch_ns={str(name): float(time) for name, time in document["launch_ns"].items()},
    )
