# moved to gradalign.theory.claims
from gradalign.theory.claims import Sequences as Sequences
from gradalign.theory.claims import every_draw as every_draw
from gradalign.theory.claims import every_order as every_order
from gradalign.theory.claims import lemma_1 as lemma_1
from gradalign.theory.claims import linear_scaling as linear_scaling
from gradalign.theory.claims import mirrored_draws as mirrored_draws
from gradalign.theory.claims import surrogate as surrogate
from gradalign.theory.claims import theorem_1 as theorem_1
