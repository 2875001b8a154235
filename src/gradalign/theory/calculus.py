# moved to gradalign.theory.problems
from gradalign.theory.problems import Calculus as Calculus
