# moved to gradalign.client.trainer
from gradalign.client.trainer import check_device as check_device
