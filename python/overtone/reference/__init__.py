"""The specification: every function of overtone in plain PyTorch, readable as the papers' formulas."""

from overtone.reference.frequency import de_escalate, frequency_components, frequency_filter, frequency_norms

__all__ = ["de_escalate", "frequency_components", "frequency_filter", "frequency_norms"]
