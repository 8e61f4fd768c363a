"""Configuration of miles-diffusion: one frozen root with a section for the sampler."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SdeStepConfig(_Section):
    """The stochastic step of Flow-GRPO."""

    kind: Literal["sde"] = "sde"
    noise_level: NonNegativeFloat = Field(default=0.7, description="Eta: how much noise a step adds; 0 is the ODE.")


class CpsStepConfig(_Section):
    """The coefficients-preserving step."""

    kind: Literal["cps"] = "cps"
    noise_level: float = Field(default=0.7, ge=0, le=1, description="Share of the noise that is drawn anew, 0 to 1.")


class DanceStepConfig(_Section):
    """The step of constant noise level."""

    kind: Literal["dance"] = "dance"
    noise_level: NonNegativeFloat = Field(default=0.3, description="Eta: standard deviation a unit of time.")


class OdeStepConfig(_Section):
    """The deterministic Euler step."""

    kind: Literal["ode"] = "ode"


StepConfig = Annotated[
    SdeStepConfig | CpsStepConfig | DanceStepConfig | OdeStepConfig,
    Field(discriminator="kind", description="How the next latent follows from the present one."),
]


class SamplerConfig(_Section):
    """Denoising: how many steps, on which grid, of which kind."""

    num_steps: PositiveInt = Field(default=10, description="Denoising steps of a rollout.")
    shift: PositiveFloat = Field(default=3.0, description="Shift of the sigma grid towards noise; 1 leaves it even.")
    step: StepConfig = Field(default_factory=SdeStepConfig)


class DiffusionConfig(_Section):
    """Root configuration of miles-diffusion."""

    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="The sampler of rollouts.")
