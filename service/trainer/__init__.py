"""Training one bundle: ``run`` takes a data file through collection, labels, fits and evaluation to the store.

``options`` declares a run's choices, ``publish`` makes the bundle's parts, ``record`` the evaluation file, ``card`` and
``plots`` the model card.  Importing this package loads neither torch nor scikit-learn; ``service.trainer.run`` does.
"""
