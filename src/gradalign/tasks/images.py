# moved to gradalign.tasks.paper
from gradalign.tasks.paper import CropAndFlip as CropAndFlip
from gradalign.tasks.paper import Normalise as Normalise
