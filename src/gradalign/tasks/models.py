# moved to gradalign.tasks.paper
from gradalign.tasks.paper import CharLSTM as CharLSTM
from gradalign.tasks.paper import emnist_cnn as emnist_cnn
from gradalign.tasks.paper import lenet as lenet
