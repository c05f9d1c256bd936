"""Keeps Keras from compiling by XLA what holds a collective, which XLA cannot."""

from __future__ import annotations

from typing import Any

from sparkvod import log

_SAID: set[str] = set()


def refuse_jit() -> None:
    """Makes Keras answer, when it asks whether a model may be compiled, no for models with a distributed optimizer.

    Keras asks for ``jit_compile="auto"``, its default, and for True, and then goes on without. Where Keras has no such
    question the op itself says why it cannot be compiled.
    """
    from keras.src.trainers import trainer

    asked = getattr(trainer, "model_supports_jit", None)
    if asked is None or hasattr(asked, "sparkvod"):
        return

    def model_supports_jit(model: Any) -> bool:
        if not asked(model):
            return False
        if not hasattr(getattr(model, "optimizer", None), "_sparkvod"):
            return True
        if "jit" not in _SAID:
            _SAID.add("jit")
            log.get("keras").info(
                "jit_compile is off: XLA compiles no code that waits for other ranks, as a distributed optimizer does"
            )
        return False

    model_supports_jit.sparkvod = True  # type: ignore[attr-defined]
    trainer.model_supports_jit = model_supports_jit
