"""Triton's interpreter under numpy 2.4, which makes no int of an array of one element: what it has for scalars."""

from __future__ import annotations

import sys
from typing import Any


def mend_triton_interpreter() -> None:
    """`range` over what a kernel has loaded or computed works again. Nothing where no test has imported the interpreter."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")  # Any: its private functions
    if interpreter is None or hasattr(interpreter, "_inflight_mended"):
        return
    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended
    interpreter._inflight_mended = True
