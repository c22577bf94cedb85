"""The guest's kernel and initramfs: found or assembled from distribution packages, cached, checked.

Owns the cache directory of images. Knows nothing of VMs that boot them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Image", "assemble", "find"]


@dataclass(frozen=True, slots=True)
class Image:
    """Two files that boot, immutable: world-readable, below the cache directory. `version` names kernel and agent."""

    kernel: Path
    initramfs: Path
    version: str
    can_network: bool


def find(cache_dir: Path) -> Image | None:
    """Return the image in the cache if it is there, whole and of this agent; else None."""


def assemble(cache_dir: Path, say: Callable[[str], None] = lambda line: None) -> Image:
    """Return the cached image, or make one: several processes may, at once. `say` is told each step.

    `EngineUnavailable` says what is missing and what to install.
    """
