import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.math.BigDecimal;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.stream.LongStream;
import java.util.zip.CRC32;
import org.openapitools.client.ApiClient;
import org.openapitools.client.api.DevicesApi;
import org.openapitools.client.model.*;

/**
 * Works for one round through the gateway, with the classes that scripts/test-openapi generates.
 * The run must have a template of the column `text`, the exchange `losses` and a cross-entropy, and
 * no bias, `privacy` or `calibration: labels`. The rows are JSON lines.
 *
 * FEDONE_TOKEN=... java Device http://127.0.0.1:8080 rows.jsonl
 */
public class Device {
  public static void main(String[] given) throws Exception {
    List<JsonNode> held = new ArrayList<>();
    for (String line : Files.readAllLines(Path.of(given[1]))) held.add(new ObjectMapper().readTree(line));
    DevicesApi unknown = api(given[0], System.getenv("FEDONE_TOKEN"));
    DevicesApi api = api(given[0], unknown.enrol(new Enrol()).getCredential());
    Assignment claimed = api.claim(new Claim().numExamples((long) held.size()).waitS(25.0));
    if (claimed == null || !(claimed.getActualInstance() instanceof LossesAssignment work))
      throw new IllegalStateException("there is no work in the exchange `losses` now");
    try {
      LossesUpdate update = score(api, work, held);
      Receipt receipt = api.update(work.getAssignmentId(), new Update(update));
      System.out.println(receipt.getRound() + " " + update.getLosses());
    } catch (UnsupportedOperationException refusal) {
      api.decline(work.getAssignmentId(), new Decline().reason(refusal.getMessage()));
      throw refusal;
    }
  }

  private static DevicesApi api(String server, String secret) {
    ApiClient client = new ApiClient();
    client.updateBaseUri(server);
    client.setRequestInterceptor(request ->
        request.header("Authorization", "Bearer " + secret).header("FedOne-Protocol", "1"));
    return new DevicesApi(client);
  }

  private static LossesUpdate score(DevicesApi api, LossesAssignment work, List<JsonNode> held) throws Exception {
    RunTask run = api.task(work.getRunId());
    TaskSpec task = run.getTask();
    boolean plain = run.getPrivacy() == null && task.getTemplate() != null && task.getBias() == null;
    plain = plain && run.getCalibration().getKind() == CalibrationSpec.KindEnum.NONE;
    if (!plain || task.getLoss() != TaskSpec.LossEnum.CROSS_ENTROPY || crc32(task) != run.getTaskCrc32())
      throw new UnsupportedOperationException("the run needs what this device does not have");
    List<JsonNode> batch = draw(held, batchSize(run.getMethod().getActualInstance()), work.getMinibatchSeed());
    Score ask = new Score().assignmentId(work.getAssignmentId());
    for (JsonNode row : batch) ask.addExamplesItem(Map.of("text", row.get("text").asText()));
    Scores scores = api.score(ask);
    Tensor table = scores.getLogProbs();
    List<Long> shape = table.getShape(); // prompts, examples, labels
    ByteBuffer values = ByteBuffer.wrap(Base64.getDecoder().decode(table.getData())).order(ByteOrder.LITTLE_ENDIAN);
    List<String> labels = task.getLabels().stream().map(Label::getValue).toList();
    if (!scores.getFailed().isEmpty()) throw new UnsupportedOperationException("the model failed");
    LossesUpdate update = new LossesUpdate().numExamples((long) held.size()).usage(new Usage());
    update.scored(new Scored().scored(shape.get(1))).model(scores.getModel());
    for (int prompt = 0; prompt < shape.get(0); prompt++) {
      BigDecimal sum = BigDecimal.ZERO; // exact
      for (JsonNode row : batch) {
        double[] logProbs = LongStream.range(0, shape.get(2)).mapToDouble(i -> values.getFloat()).toArray();
        int target = labels.indexOf(row.get(task.getLabelField()).asText());
        sum = sum.add(new BigDecimal(loss(logProbs, target)));
      }
      update.addLossesItem(sum.doubleValue() / batch.size());
    }
    return update;
  }

  private static long batchSize(Object method) {
    if (method instanceof SearchSpec search) return search.getBatchSize();
    return method instanceof GradientSpec paper ? paper.getBatchSize() : ((OwnMethodSpec) method).getBatchSize();
  }

  private static double loss(double[] logProbs, int target) {
    double odds = 0;
    for (double one : logProbs) odds += Math.exp(one - logProbs[target]);
    return Math.log(odds);
  }

  /** The rows that a seed draws: SplitMix64 and a partial Fisher-Yates shuffle, unsigned 64 bits. */
  private static List<JsonNode> draw(List<JsonNode> held, long size, long seed) {
    List<JsonNode> rows = new ArrayList<>(held);
    int count = (int) Math.min(size, rows.size());
    for (int i = 0; i < count; i++) {
      seed += 0x9E3779B97F4A7C15L;
      long z = (seed ^ (seed >>> 30)) * 0xBF58476D1CE4E5B9L;
      z = (z ^ (z >>> 27)) * 0x94D049BB133111EBL;
      z ^= z >>> 31;
      long left = held.size() - i;
      Collections.swap(rows, i, i + (int) (Math.multiplyHigh(z, left) + ((z >> 63) & left)));
    }
    return rows.subList(0, count);
  }

  /** The checksum of the task, which must equal the server's `task_crc32`. */
  private static long crc32(TaskSpec task) {
    String loss = task.getLoss().getValue();
    List<String> texts = new ArrayList<>(List.of(loss, task.getLabelField(), task.getTemplate()));
    texts.addAll(task.getSlots());
    for (Label label : task.getLabels()) texts.addAll(List.of(label.getValue(), label.getWord()));
    CRC32 found = new CRC32();
    for (String text : texts) found.update((text + "\0").getBytes(StandardCharsets.UTF_8));
    return found.getValue();
  }
}
