import { secret } from "./random.js";
import type { Random } from "./random.js";
import type { Enrolled } from "./messages.js";
import { Kept } from "./storage.js";
import type { EdgeStorage } from "./storage.js";

interface Document {
  readonly server: string;
  readonly client_id?: string;
  readonly credential?: string;
  readonly nonce?: string;
}

/** A device's identity at one server: credential and enrolment nonce, kept across restarts. */
export class Identity {
  readonly #kept: Kept<Document>;
  #document: Document;
  #loaded = false;

  constructor(
    storage: EdgeStorage,
    readonly server: string,
    readonly random: () => Random,
  ) {
    this.#document = { server };
    this.#kept = new Kept(storage, server, "identity", (found) => {
      // Another server's, whose name differs in characters that keys do not have.
      if (found["server"] !== server) return undefined;
      const texts = ["client_id", "credential", "nonce"].filter((key) => key in found);
      return texts.every((key) => typeof found[key] === "string")
        ? (found as unknown as Document)
        : undefined;
    });
  }

  /** The device's public name; undefined until it has enrolled. */
  get clientId(): string | undefined {
    return this.#document.client_id;
  }

  /** Its secret; undefined until it has enrolled. */
  get credential(): string | undefined {
    return this.#document.credential;
  }

  /** Reads what was kept, once. */
  async load(): Promise<void> {
    if (this.#loaded) return;
    this.#document = (await this.#kept.load()) ?? this.#document;
    this.#loaded = true;
  }

  /**
   * The secret to enrol with, kept before it is used: sent again with it, after an answer that was
   * lost or a restart, the enrolment gives the same client.
   */
  async nonce(): Promise<string> {
    const nonce = this.#document.nonce ?? secret(this.random());
    await this.#save({ server: this.server, nonce });
    return nonce;
  }

  /** Keeps a new identity. */
  async enrolled({ client_id, credential }: Enrolled): Promise<void> {
    await this.#save({ server: this.server, client_id, credential });
  }

  /** Removes an identity that the server refuses. */
  async forget(): Promise<void> {
    await this.#save({ server: this.server });
  }

  async #save(document: Document): Promise<void> {
    this.#document = document;
    await this.#kept.save(document);
  }
}
