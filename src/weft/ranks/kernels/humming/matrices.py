"""`Matrices` that multiplies quantised weights by humming-kernels where that is right and wanted, and all others in
Triton."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

import torch

from weft.checkpoint.architectures.shape import Experts
from weft.logs import event_fields
from weft.plan.backends import against_fused_experts
from weft.plan.products import WAY_OUT
from weft.ranks.kernels.humming import check
from weft.ranks.kernels.humming.layout import obstacle
from weft.ranks.kernels.humming.library import Library, first_line, load_library
from weft.ranks.kernels.humming.products import (
    HummingExperts,
    HummingMatrix,
    RepackedWeight,
    create_locks,
    repack,
    repack_experts,
)
from weft.ranks.kernels.humming.race import HUMMING, OWN, Contestant, ProductRaces
from weft.ranks.kernels.matrices import ExpertProducts, ExpertStack, Product
from weft.ranks.kernels.triton.experts import TritonExperts, pack_stack
from weft.ranks.kernels.triton.kernels import TritonMatrices
from weft.ranks.kernels.triton.products import create_quantised_matrix
from weft.ranks.kernels.usable import UnusableError
from weft.ranks.kernels.warm import KernelLaunch
from weft.ranks.quant.quantised import QuantisedWeight

logger = logging.getLogger("weft")

M = TypeVar("M")


class HummingMatrices(TritonMatrices):
    """Products by the library for steps of up to `tokens` tokens, on `device`.

    The first product of each shape is compiled and compared, with each of its tiles (see `check`), and with `races` it
    must be the faster one. If the library fails, or computes another result, there is one warning; what comes later is
    multiplied in Triton.
    """

    def __init__(
        self,
        device: torch.device,
        processors: int,
        tokens: int,
        *,
        fp8_units: bool = False,
        races: ProductRaces | None = None,
    ) -> None:
        super().__init__(processors, fp8_units=fp8_units)
        self._tokens, self._races = tokens, races
        self._chosen: dict[Hashable, bool] = {}
        self._library_matrices: dict[Hashable, HummingMatrix] = {}
        self._library_experts: dict[Hashable, HummingExperts] = {}
        self._with_biases: list[HummingMatrix | HummingExperts] = []
        self._library: Library | None = None
        try:
            self._library = load_library()
            self._locks = create_locks(device)
        except Exception as error:
            self._stop(error)

    @property
    def uses_library(self) -> bool:
        """True if the library multiplies at least one weight."""
        return bool(self._library_matrices or self._library_experts)

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> Product:
        if isinstance(weight, QuantisedWeight) and (product := self._try(partial(self._matrix, weight, bias))):
            self._library_matrices.setdefault(product.kind, product)
            if bias is not None:
                self._with_biases.append(product)
            return self._hold(name, product)
        return super().matrix(weight, bias, name)

    def experts(self, spec: Experts, gate_up: ExpertStack, down: ExpertStack, first: int) -> ExpertProducts:
        if against_fused_experts("triton", spec) is None and (
            experts := self._try(partial(self._experts_of, spec, gate_up, down, first))
        ):
            for stack, weight in ((gate_up, experts.gate_up), (down, experts.down)):
                self._hold(stack.name, weight)
            self._library_experts.setdefault(experts.kind, experts)
            self._with_biases.append(experts)
            return experts
        return super().experts(spec, gate_up, down, first)

    def against_replacing(self, name: str, weight: torch.Tensor | QuantisedWeight) -> str | None:
        by_library = isinstance(self._products.get(name), HummingMatrix | RepackedWeight)
        reason = obstacle(weight) if by_library and isinstance(weight, QuantisedWeight) else None
        return reason and f"humming-kernels cannot take {name}: {reason}; restart with --product-backend own"

    def refresh_biases(self) -> None:
        for product in self._with_biases:
            product.refresh_bias()

    def launches(self, tokens: int) -> Sequence[Sequence[KernelLaunch]]:
        own = super().launches(tokens)
        parts = self._library_matrices.values(), self._library_experts.values()
        return [*own, *(list(chain(*(product.launches(tokens) for product in part))) for part in parts)]

    def _try(self, make: Callable[[Library], M | None]) -> M | None:
        """A product by the library; None if it has failed, now or before."""
        if self._library is None:
            return None
        try:
            return make(self._library)
        except Exception as error:
            self._stop(error)
            return None

    def _stop(self, error: BaseException) -> None:
        """Warn once, and leave the library alone from here on."""
        self._library = None
        logger.warning(
            "Products by humming-kernels cannot be used: %s. Weft's own kernels multiply instead; %s",
            error if isinstance(error, UnusableError) else first_line(error),
            WAY_OUT,
            extra=event_fields("products-replaced", reason=str(error)),
        )

    def _matrix(self, weight: QuantisedWeight, bias: torch.Tensor | None, library: Library) -> HummingMatrix | None:
        kind = weight.type, *weight.shape, weight.dtype, bias is None
        if self._chosen.get(kind) is False or self._refuses(weight):
            return None
        product = HummingMatrix(self._repack(library, self._tokens, weight, bias))
        if kind not in self._chosen:
            self._compare(kind, check.matrix_difference(product, weight, bias, self._tokens))
            self._chosen[kind] = self._wins(kind, partial(self._race_matrix, weight, bias, product))
        return product if self._chosen[kind] else None

    def _experts_of(
        self, spec: Experts, gate_up: ExpertStack, down: ExpertStack, first: int, library: Library
    ) -> HummingExperts | None:
        stacks = gate_up, down
        if any(not isinstance(stack.weight, QuantisedWeight) or self._refuses(stack.weight) for stack in stacks):
            return None
        kind = spec, *((stack.weight.type, *stack.weight.values.shape, stack.bias is None) for stack in stacks)  # type: ignore[union-attr]
        if self._chosen.get(kind) is False:
            return None
        rows = self._tokens * spec.top_k
        experts = repack_experts(partial(self._repack, library, rows), spec, gate_up, down, first)
        if kind not in self._chosen:
            self._compare(kind, check.experts_difference(experts, gate_up, down, self._tokens))
            self._chosen[kind] = self._wins(kind, partial(self._race_experts, gate_up, down, experts))
        return experts if self._chosen[kind] else None

    def _refuses(self, weight: QuantisedWeight) -> bool:
        if reason := obstacle(weight):
            logger.debug("humming-kernels does not multiply %s %s: %s", weight.type, weight.shape, reason)
        return reason is not None

    def _repack(
        self, library: Library, rows: int, weight: QuantisedWeight, bias: torch.Tensor | None
    ) -> RepackedWeight:
        return repack(library, weight, bias, self._locks, rows)

    def _compare(self, kind: Hashable, difference: float) -> None:
        """Raises UnusableError if the library's result is another one."""
        if difference > check.TOLERANCE:
            raise UnusableError(
                f"its product of {kind} differs from what the weights stand for by {difference:.1%} of its "
                f"norm, more than {check.TOLERANCE:.0%}"
            )

    def _wins(self, kind: Hashable, contestants: Callable[[], dict[str, Contestant]]) -> bool:
        return self._races is None or self._races.winner(kind, contestants) == HUMMING

    def _race_matrix(
        self, weight: QuantisedWeight, bias: torch.Tensor | None, product: HummingMatrix
    ) -> dict[str, Contestant]:
        own = create_quantised_matrix(weight, bias, self._processors)
        return {
            name: lambda rows, each=each: partial(each, check.draw(rows, weight.shape[1], weight))  # type: ignore[misc]
            for name, each in ((OWN, own), (HUMMING, product))
        }

    def _race_experts(self, gate_up: ExpertStack, down: ExpertStack, experts: HummingExperts) -> dict[str, Contestant]:
        spec, held = experts.spec, experts.down.experts
        own = TritonExperts(
            spec=spec,
            gate_up=pack_stack(gate_up),
            down=pack_stack(down),
            first=experts.first,
            processors=self._processors,
        )

        def contestant(each: ExpertProducts) -> Contestant:
            def of_rows(rows: int) -> Callable[[], object]:
                x = check.draw(rows, gate_up.weight.shape[-1], gate_up.weight)
                generator = torch.Generator().manual_seed(check.SEED)
                chosen = torch.rand(rows, max(held, spec.top_k), generator=generator).topk(spec.top_k).indices % held
                shares = torch.ones(rows, spec.top_k, device=x.device)
                return partial(each, x, chosen.to(x.device) + experts.first, shares)

            return of_rows

        return {OWN: contestant(own), HUMMING: contestant(experts)}
