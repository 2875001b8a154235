# moved to gradalign.tasks.paper
from gradalign.tasks.paper import as_codes as as_codes
from gradalign.tasks.paper import shakespeare as shakespeare
