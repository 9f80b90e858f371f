"""The ways in: whatever a model is given as becomes an OpenVINO IR with a tokenizer."""
