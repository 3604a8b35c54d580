"""Training: `overtone train` from Python.

    from overtone.training import TrainConfig, load_model, train

    result = train(TrainConfig(data="digits", regime="sharpen", depth=4, epochs=20), "runs/sharpen", resume=True)
    model = load_model("runs/sharpen")
    predictions = list(predict("runs/sharpen", ["photo.png", "folder"]))

    train(TrainConfig(data="text", regime="sharpen,sharpen,free,free", depth=4, epochs=5), "runs/text")
    print(continue_text("runs/text", "The with statement"))

It needs packages that overtone itself does not: pip install 'overtone[study]'.
"""

from overtone.training.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from overtone.training.data import Data, DataInfo, load_data, resolved
from overtone.training.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    LostProcessError,
    ResourceError,
    TrainingError,
)
from overtone.training.inference import Prediction, continue_text, predict
from overtone.training.model import build_model, load_config, load_info, load_model
from overtone.training.trainer import TrainResult, train
