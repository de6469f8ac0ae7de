"""Explicit networks to compare with."""

from wellposed.baselines.convnet import ConvNet
from wellposed.baselines.eikonet import EikoNet
from wellposed.baselines.encoder_decoder import ArgmaxTransformer, ArrayTransformer
from wellposed.baselines.feedforward import FeedForward
from wellposed.baselines.linear import LinearRegression
from wellposed.baselines.lstm import LSTM
from wellposed.baselines.mlp import MLP, MLP_ACTIVATIONS, parameter_count
from wellposed.baselines.nalu import INALU, NAC, NALU
from wellposed.baselines.published import PUBLISHED, Published, build, parameter_table
from wellposed.baselines.resnet import ResNet
from wellposed.baselines.rnn import ReLURNN
from wellposed.baselines.transformer import ArrayEncoder, SequenceEncoder

__all__ = [
    "INALU",
    "LSTM",
    "MLP",
    "MLP_ACTIVATIONS",
    "NAC",
    "NALU",
    "PUBLISHED",
    "ArgmaxTransformer",
    "ArrayEncoder",
    "ArrayTransformer",
    "ConvNet",
    "EikoNet",
    "FeedForward",
    "LinearRegression",
    "Published",
    "ReLURNN",
    "ResNet",
    "SequenceEncoder",
    "build",
    "parameter_count",
    "parameter_table",
]
