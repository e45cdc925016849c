"""Scalars and text for TensorBoard, W&B and MLflow while training runs."""
