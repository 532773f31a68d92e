"""The loss scaler, the train state and the train steps."""
