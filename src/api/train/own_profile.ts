/**
 * The profile that `loramem doctor --calibrate` measured on this machine: one JSON file per kind of device in the user's
 * config folder (`$XDG_CONFIG_HOME/loramem`, else `~/.config/loramem`). It changes predicted times, never results.
 */
import { mkdir, readFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { LoramemError } from "../../ffi/error.ts";
import { loadRuntime } from "../../ffi/runtime.ts";
import { writeFileAtomic } from "../io/atomic.ts";
import type { Device } from "../memory/mod.ts";
import { type DeviceProfile, parseProfile, profileOf } from "../plan/profiles.ts";
import { calibrate } from "./calibrate.ts";

/** File of the profile of a kind of device; null where there is no home folder, or no permission to ask for it. */
async function ownProfileFile(kind: string): Promise<string | null> {
  const { env } = await loadRuntime();
  const home = env("HOME");
  const config = env("XDG_CONFIG_HOME") || (home ? join(home, ".config") : null);
  return config === null ? null : join(config, "loramem", `profile-${kind.split(":")[0]}.json`);
}

/**
 * The measured profile of a kind of device.
 *
 * @param kind `"cpu"`, `"cuda"` or `"cuda:<n>"`.
 * @param deviceName The name that the driver gives; a profile of another device is left alone. null = any.
 * @returns null if nothing was measured.
 * @throws {LoramemError} BAD_ARGUMENT if the file is no profile, naming it and the field.
 */
export async function readOwnProfile(
  kind: string,
  deviceName: string | null,
): Promise<DeviceProfile | null> {
  const file = await ownProfileFile(kind);
  const text = file === null ? null : await readFile(file, "utf8").catch(() => null);
  if (file === null || text === null) return null;
  let json: unknown = null;
  try {
    json = JSON.parse(text);
  } catch {
    // Refused below, with the name and what is allowed.
  }
  const profile = parseProfile(json, file);
  const { device } = json as { device?: unknown };
  return deviceName === null || device === deviceName ? profile : null;
}

/** The profile of an opened device: the measured one, else the nearest shipped one. */
export async function profileOfDevice(kind: string, deviceName: string): Promise<DeviceProfile> {
  return (await readOwnProfile(kind, deviceName)) ?? profileOf(kind, deviceName);
}

/**
 * Measures a device that is otherwise idle, in a few seconds.
 *
 * @returns Its profile; what only a data sheet tells comes from the shipped profile of the device, if there is one.
 */
export async function measureProfile(device: Device): Promise<DeviceProfile> {
  const { name, memoryTotal, threads } = device.info();
  const deviceName = String(name ?? device.kind);
  const nearest = profileOf(device.kind, deviceName);
  const slug = deviceName.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-");
  const onCpu = device.kind === "cpu";
  const shipped = onCpu || slug.includes(nearest.name);
  const unknown = { name: slug, peak: null, memory: Number(memoryTotal), driver: null };
  const what = onCpu ? `${deviceName}, ${threads} threads` : deviceName;
  const title = `${what} (measured on this machine)`;
  return await calibrate(device, { ...nearest, ...(shipped ? {} : unknown), title });
}

/**
 * Keeps a measured profile for later runs.
 *
 * @returns The file.
 * @throws {LoramemError} IO if it cannot be written.
 */
export async function writeOwnProfile(
  kind: string,
  deviceName: string,
  profile: DeviceProfile,
): Promise<string> {
  const file = await ownProfileFile(kind);
  if (file === null) {
    const message = "doctor: no folder for the profile: HOME is not set: set XDG_CONFIG_HOME";
    throw new LoramemError("IO", message, { file: "profile" });
  }
  try {
    await mkdir(dirname(file), { recursive: true });
  } catch (cause) {
    const errno = String((cause as { code?: unknown }).code);
    const message = `doctor: the folder of the profile cannot be made: ${dirname(file)} (${errno}): set XDG_CONFIG_HOME`;
    throw new LoramemError("IO", message, { file: dirname(file), errno }, { cause });
  }
  const text = `${JSON.stringify({ ...profile, device: deviceName }, null, 2)}\n`;
  await writeFileAtomic(file, [new TextEncoder().encode(text)]);
  return file;
}
