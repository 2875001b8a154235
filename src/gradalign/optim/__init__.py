"""GradAlign in your own training loop: a wrapper around any ``torch.optim`` optimizer.

One large batch is given as n parts. With g_i = ∇f_i(x) and ḡ their mean, a step hands the wrapped optimizer

    (1/n) Σ ∇f_i( x − β(ḡ − g_i) )

instead of ḡ: Algorithm 1 of Dandi, Barba & Jaggi 2022 when the wrapped optimizer is SGD. Momentum, weight decay and
Adam's moments stay the wrapped optimizer's. With β = 0 the step is the wrapped optimizer's own, to the last bit. Under
``torchrun`` every rank is one part, or holds several, and a step costs two all-reduces.
"""

from gradalign.optim.gradalign import GradAlign

__all__ = ["GradAlign"]
