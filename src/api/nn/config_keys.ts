/**
 * The keys of real config.json files that change nothing in training, or nothing as long as they
 * have a certain value. Any other key that a family does not read is an error: a key that is
 * ignored silently trains another model than the one that will be served.
 */
import { badConfig, type ConfigReader, excerpt, unsupported } from "./config_reader.ts";

/** Never change the forward or the backward pass. */
const INERT = new Set([
  "_attn_implementation_autoset",
  "_commit_hash",
  "_name_or_path",
  "bos_token_id",
  "do_sample", // a default of generation, as max_length, temperature and top_p
  "eos_token_id",
  "id2label",
  "initializer_range", // the weights come from the checkpoint
  "is_llama_config", // a note of SmolLM on where its weights come from
  "label2id",
  "max_length",
  "max_sequence_length", // beside max_position_embeddings in the first Llama
  "pad_token_id",
  "return_dict",
  "temperature",
  "tokenizer_class",
  "top_p",
  "transformers.js_config",
  "transformers_version",
  "unsloth_fixed",
  "unsloth_version",
  "use_cache",
]);

/** Change nothing while they have this value, or null. */
const NEUTRAL: ReadonlyMap<string, unknown> = new Map<string, unknown>([
  ["attention_dropout", 0],
  ["hidden_act", "silu"],
  ["is_encoder_decoder", false],
  ["neftune_noise_alpha", 0],
  ["output_attentions", false],
  ["output_hidden_states", false],
  ["partial_rotary_factor", 1],
  ["pretraining_tp", 1], // above 1 it reorders sums only, but nobody trains so today
  ["qk_layer_norms", false],
  ["rope_interleaved", false],
  ["use_mrope", false],
]);

const QUANTIZED = "train from the checkpoint with float weights";

/** Understood, but nothing here can run it. */
const REFUSED: ReadonlyMap<string, string> = new Map([
  ["auto_map", "the model brings its own code; take a checkpoint of the plain architecture"],
  ["compression_config", QUANTIZED],
  ["quantization", QUANTIZED],
  ["quantization_config", QUANTIZED],
]);

/**
 * Checks the keys that a family did not read.
 *
 * @param reader What is left of config.json.
 * @throws {LoramemError} `UNSUPPORTED` for a known key whose value changes the model; `BAD_CONFIG`
 * for a key that is not known.
 */
export function checkRemainingKeys(reader: ConfigReader): void {
  for (const [key, value] of reader.rest()) {
    if (INERT.has(key)) continue;
    const refused = REFUSED.get(key);
    if (refused !== undefined) {
      if (value !== null) throw unsupported(reader.file, key, value, refused);
    } else if (!NEUTRAL.has(key)) {
      const fix = "it may change the model; remove it if you know that it does not";
      throw badConfig(reader.file, key, `unknown key ${key} = ${excerpt(value)}`, fix);
    } else if (value !== null && value !== NEUTRAL.get(key)) {
      throw unsupported(
        reader.file,
        key,
        value,
        `only ${excerpt(NEUTRAL.get(key))} can be trained`,
      );
    }
  }
}
