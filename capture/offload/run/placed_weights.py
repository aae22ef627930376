"""Check where the weights of a Program on several devices lie, before any segment is queued."""

from __future__ import annotations

from offload.errors import BindingError
from offload.interpreter.torch_names import dtype_name
from offload.program import ITEM_BYTES, BoundProgram, same_strides


class WeightPlaces:
    """The addresses of a Program's weights, as segments and copies know them.

    A segment alone would refuse a moved weight only after earlier segments have written.

    Owner: one executable. Thread: one at a time.
    """

    def __init__(self, bound: BoundProgram) -> None:
        """Note where they lie now."""
        self._bound = bound
        self._holders = [
            (value, holder)
            for value, holders in bound.bindings.weights.items()
            for holder in holders
        ]
        self.take()

    def take(self) -> None:
        """Expect weights where they lie now."""
        self._addresses = self._present()

    def check(self) -> None:
        """Refuse weights that lie elsewhere.

        Raises:
            BindingError: naming one of them.
        """
        now = self._present()
        if now == self._addresses:
            return
        moved = zip(self._holders, now, self._addresses, strict=True)
        value = next(value for (value, _), found, known in moved if found != known)
        raise BindingError(
            f"{self._bound.program.values[value].name}: its storage has changed since the program "
            "was loaded: call rebind_weights(), or restore its storage"
        )

    def check_layouts(self) -> None:
        """Refuse weights with another layout than recorded, wherever they lie.

        Raises:
            BindingError: naming one of them.
        """
        program = self._bound.program
        for value, holders in self._bound.bindings.weights.items():
            bases = set()
            for one, view in zip(holders, program.weight_views[value], strict=True):
                shape = tuple(one.shape)
                is_same = (
                    shape == view.shape
                    and dtype_name(one.dtype) == view.dtype
                    and same_strides(shape, one.stride(), view.strides)
                )
                if not is_same:
                    raise BindingError(
                        f"{program.values[value].name}: expected {view.dtype}{list(view.shape)} "
                        f"with strides {list(view.strides)}, got {dtype_name(one.dtype)}"
                        f"{list(shape)} with strides {list(one.stride())}: capture again"
                    )
                begin = int(one.storage_offset()) * ITEM_BYTES[view.dtype] - view.offset_bytes
                bases.add((one.untyped_storage()._cdata, begin))
            if len(bases) > 1:
                raise BindingError(
                    f"{program.values[value].name}: the tensors that hold it shared memory when it "
                    "was recorded, and do not now: give all of them the new storage, or capture "
                    "again"
                )

    def _present(self) -> list[int]:
        return [holder.data_ptr() for _, holder in self._holders]
