/** AdamW as in the paper. */

/** State of one parameter vector. */
export interface AdamState {
  readonly p: Float64Array;
  readonly m: Float64Array;
  readonly v: Float64Array;
}

/** Settings of a step. */
export interface AdamSettings {
  readonly learningRate: number;
  readonly beta1: number;
  readonly beta2: number;
  readonly eps: number;
  readonly weightDecay: number;
  readonly step: number;
}

/** L2 norm. */
export function norm(g: Float64Array): number {
  return Math.sqrt(g.reduce((total, value) => total + value * value, 0));
}

/** One update, in place. */
export function adamw(
  state: AdamState,
  g: Float64Array,
  clip: number,
  settings: AdamSettings,
): void {
  const { learningRate, beta1, beta2, eps, weightDecay, step } = settings;
  const { p, m, v } = state;
  for (let i = 0; i < p.length; i++) {
    const gradient = (g[i] as number) * clip;
    m[i] = beta1 * (m[i] as number) + (1 - beta1) * gradient;
    v[i] = beta2 * (v[i] as number) + (1 - beta2) * gradient * gradient;
    const mean = (m[i] as number) / (1 - beta1 ** step);
    const variance = (v[i] as number) / (1 - beta2 ** step);
    const decayed = (p[i] as number) * (1 - learningRate * weightDecay);
    p[i] = decayed - (learningRate * mean) / (Math.sqrt(variance) + eps);
  }
}
