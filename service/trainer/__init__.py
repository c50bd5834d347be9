"""Training one bundle, top to bottom: dataset -> label -> collect -> fit -> calibrate -> evaluate -> publish.

Importing this package loads neither torch nor scikit-learn; ``service.trainer.run`` does.
"""
