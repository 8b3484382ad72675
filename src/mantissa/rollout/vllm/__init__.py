"""vLLM as the rollout engine, in process or as a server."""
