# moved to gradalign.theory.claims
from gradalign.theory.claims import STEPS as STEPS
from gradalign.theory.claims import fedga as fedga
from gradalign.theory.claims import forms as forms
from gradalign.theory.claims import gradalign as gradalign
from gradalign.theory.claims import measuring_tools as measuring_tools
from gradalign.theory.claims import scaffold as scaffold
