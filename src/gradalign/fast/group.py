# moved to gradalign.fast
from gradalign.client.trainer import named_failure as named_failure
from gradalign.fast import EVALUATION_CHUNK as EVALUATION_CHUNK
from gradalign.fast import Group as Group
from gradalign.fast import evaluation_spans as evaluation_spans
from gradalign.fast import groups as groups
