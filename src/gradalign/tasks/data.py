# moved to gradalign.tasks.task
from gradalign.tasks.batches import DatasetExamples as DatasetExamples
from gradalign.tasks.batches import Examples as Examples
from gradalign.tasks.batches import TensorExamples as TensorExamples
from gradalign.tasks.batches import Transform as Transform
from gradalign.tasks.batches import as_examples as as_examples
from gradalign.tasks.batches import example_count as example_count
from gradalign.tasks.task import PartitionedClients as PartitionedClients
