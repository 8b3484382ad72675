"""What is wrong between the policy that samples and the policy that learns, from both sides' log-probs."""
